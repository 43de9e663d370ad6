"""The recipe of triptych-mini: from drawings to a trained vision panel."""
