"""Inference with trained models: opening, predicting and serving over HTTP; and the server of the live page."""
