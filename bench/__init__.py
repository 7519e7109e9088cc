"""Measurements of bmoe: gates/ fail, studies/ print; models/, reference and harness are what they run on and share."""
