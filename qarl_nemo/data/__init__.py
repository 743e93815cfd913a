"""Problems with verifiable answers: data sets from files or the hub, final answers, and rewards of one's own."""
