"""What is asked: tasks, their data and labels."""
