"""What trainers exchange with each other: parts of weights in a node, and gradients before they are pushed."""
