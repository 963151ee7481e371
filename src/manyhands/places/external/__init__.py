"""Run on processes that were started externally, on one host or several: their places, process group and control
plane.
"""
