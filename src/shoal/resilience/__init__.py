"""Fault tolerance: watchdog, straggler detection, stop signals, non-finite losses and spikes."""
