"""What connects the trainers to simulators; each part needs an extra of its own."""
