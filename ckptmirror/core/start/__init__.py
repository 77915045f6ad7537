"""What a start may do: one pure function over what each place says."""
