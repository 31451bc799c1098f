"""What PyTorch asks of an operator: gradients and tangents, the dispatcher, transforms."""
