"""From a prompt to the distribution of its answer's length, by the lengths of similar prompts.

Rooms, each of which imports only those before it: `store`, `predict`, then `service` and `data`;
`urgency` rests on `data`, `probe` on none. The files beside them are what all of them share.
"""
