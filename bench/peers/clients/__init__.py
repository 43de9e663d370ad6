"""What real clients do with a server, case by case; each file needs its client installed and nothing of ours."""
