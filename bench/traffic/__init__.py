"""What loads a server over HTTP: questions that know their own answers, visits, a server to visit, a tally."""
