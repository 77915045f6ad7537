"""What happened: listeners to the events of ``core.events``. The manager wires them; flow never names them."""
