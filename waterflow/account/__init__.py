"""The account of Python state: what code can read, what it was, whether it is still that."""
