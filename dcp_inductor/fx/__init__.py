"""The compile side: recognise, prove, judge, rewrite and check, one file each."""
