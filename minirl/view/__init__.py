"""Runs in a browser: their curves, their time and their trajectories, also while they go on."""
