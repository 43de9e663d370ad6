"""Texts and pictures asked of two servers: who they are, what is asked, how like the exact model they answer."""
