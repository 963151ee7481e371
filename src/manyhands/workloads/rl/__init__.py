"""Reinforcement learning: actors turn a policy and environments into rollouts, which every strategy learns from."""
