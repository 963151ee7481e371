"""Parameters in pieces with several owners: what a piece is, and the user's optimizer run on one owner's pieces."""
