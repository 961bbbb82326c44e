"""Arguments → api. Nothing is decided here."""
