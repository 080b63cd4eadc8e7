"""Runs jobs: admits them, plans and runs their steps, settles what they leave."""
