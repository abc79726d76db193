"""Long sequences shared by ranks: each computes layers for its share of the positions, and attention communicates."""
