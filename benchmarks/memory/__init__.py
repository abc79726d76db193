"""What does sharding over replicas cost, and what does it hold?"""
