"""Runs in a browser: curves, time by phase and trajectories, also while they are not done."""
