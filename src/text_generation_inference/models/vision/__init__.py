"""Models that see: a tower that turns pictures into features, beside a decoder that reads them as tokens."""
