"""What goes wrong in distributed training, from the fixes of real frameworks: mined, classified, reported, and used."""
