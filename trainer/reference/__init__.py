"""The reference backend: plain torch and transformers, small enough to be the oracle of the others."""
