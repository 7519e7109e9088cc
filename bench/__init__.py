"""Measurements of bmoe: gates/ fail, studies/ print, models/ has what both run on, reference what they compare with."""
