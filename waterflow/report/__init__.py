"""What a run tells: reports, timelines, pictures, traces, progress."""
