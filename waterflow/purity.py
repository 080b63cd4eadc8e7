def impure_calls(calls, codes): return []
