"""The model border: who samples tokens and who scores them."""
