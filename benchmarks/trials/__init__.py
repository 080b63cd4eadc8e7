"""Many small trials, as people run them: waterflow beside loops, processes, compile and vmap.

    python -m benchmarks.trials --json
    python -m benchmarks.trials --cases optuna folds '*-8' --skip compile vmap processes

Seconds are whole wall times with all that a way needs to start: for waterflow the engine, captures
and profiles (its cache is empty), for processes their start, for torch.compile the compilation.
A compilation is given up after five minutes.
Imports are not counted, but for processes, where they are the start. Ways are run in turn, and the
medians count. `vs_eager` and `vs_best` are above 1 where waterflow is faster than the plain loop,
or than the best of the other ways.
"""
