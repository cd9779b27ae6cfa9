"""Ways to move bytes between ranks, all with the contract of `Transport`."""
