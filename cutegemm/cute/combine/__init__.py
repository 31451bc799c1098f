"""The rows of each token of a mixture added up, out of the order in which experts have them."""
