"""Contains the engines that are real servers, at the host's speed or on a device clock."""
