"""What does dividing over replicas cost, and what does it hold?"""
