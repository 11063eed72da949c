"""The five papers, table by table and figure by figure: paper | ours | difference."""
