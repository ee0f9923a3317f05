"""The tutorial's four exercises and the talk's open question, Richardson-Romberg, measured."""
