"""What operators run: commands, the doctor, shadow mode."""
