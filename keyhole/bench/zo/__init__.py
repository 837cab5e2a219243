"""`keyhole bench zo`: zeroth-order steps, textbook, resident and streamed, with the floor beside each."""
