"""HTTP servers that outlast their clients: the policy's endpoint and the reward model's."""
