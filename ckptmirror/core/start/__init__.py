"""What a start may do: one pure function of what each place reports."""
