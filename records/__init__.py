"""Pack runs into a folder nobody can doubt, audit any, compare and plot runs, write the leaderboard."""
