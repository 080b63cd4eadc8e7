"""Where the memory of steps goes, in rounds and in flow, and what that will be like."""
