"""Word vectors from plain text: GloVe (Pennington, Socher, Manning, EMNLP 2014), from counting to neighbours."""
