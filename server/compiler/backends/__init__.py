"""What a program runs on, each behind one small interface. Knows no recipe and no checkpoint."""
