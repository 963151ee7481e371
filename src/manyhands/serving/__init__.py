"""Trained models at work: opened, asked, served over HTTP; and the server of the live page."""
