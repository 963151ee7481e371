"""Federated rounds with real devices: a server over HTTPS, and the program that runs on a device."""
