"""Static late interaction: models that give a token the same vector in every text, searched as sparse vectors."""
