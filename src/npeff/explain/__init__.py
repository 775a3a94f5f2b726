"""What is inside a component: its words, its answers, its heads and neurons, its name."""
