"""Other projects' names and signatures over Pagemill's ops."""
