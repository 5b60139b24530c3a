//! How much one turn of an HTTP/2 connection may bring.
//!
//! Why bounded: what came stays with HTTP/2 until the turn is over, in rows and buffers that take more than its bytes.

/// What may come in one turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Most {
    /// DATA frames.
    pub frames: usize,
    /// Header blocks.
    pub blocks: usize,
    /// Bytes of all kinds, once a DATA frame is whole.
    pub len: usize,
}

/// What has come in the running one.
#[derive(Debug, Default)]
pub struct Turn {
    frames: usize,
    blocks: usize,
    len: usize,
    data_len: usize,
    /// The streams that DATA came for; one that several came for in a row stands here once.
    streams: Vec<u32>,
}

impl Turn {
    /// A DATA frame of so many bytes is whole.
    pub fn data_ends(&mut self, stream: u32, len: usize) {
        self.frames += 1;
        self.data_len += len;
        if self.streams.last() != Some(&stream) {
            self.streams.push(stream);
        }
    }

    /// A header block is whole.
    pub fn block_ends(&mut self) {
        self.blocks += 1;
    }

    /// So many bytes came.
    pub fn bytes_came(&mut self, len: usize) {
        if self.frames > 0 {
            self.len += len;
        }
    }

    /// No more may come.
    pub fn is_over(&self, most: &Most) -> bool {
        self.frames >= most.frames || self.blocks >= most.blocks || self.len >= most.len
    }

    /// DATA frames that are whole.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Bytes of these.
    pub fn data_len(&self) -> usize {
        self.data_len
    }

    /// Begins the next one. Gives the streams that DATA came for.
    pub fn end(&mut self) -> impl Iterator<Item = u32> {
        (self.frames, self.blocks, self.len, self.data_len) = (0, 0, 0, 0);
        self.streams.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a turn is over with the last of any kind that it may bring, and not before; the next one begins with nothing, and knows
    /// which streams DATA came for. Method: each bound alone.
    #[test]
    fn is_over_with_the_last() {
        let most = Most { frames: 3, blocks: 2, len: 100 };
        let mut turn = Turn::default();
        turn.bytes_came(1000);
        assert!(!turn.is_over(&most), "no frame waits for anybody");
        for (stream, len) in [(7, 10), (7, 20), (5, 0)] {
            assert!(!turn.is_over(&most));
            turn.data_ends(stream, len);
        }
        assert!(turn.is_over(&most));
        assert_eq!((turn.frames(), turn.data_len()), (3, 30));
        assert_eq!(turn.end().collect::<Vec<_>>(), [7, 5]);
        assert_eq!((turn.frames(), turn.data_len(), turn.end().count()), (0, 0, 0));
        turn.block_ends();
        assert!(!turn.is_over(&most));
        turn.block_ends();
        assert!(turn.is_over(&most));
        assert_eq!(turn.end().count(), 0);
        turn.data_ends(9, 1);
        turn.bytes_came(99);
        assert!(!turn.is_over(&most));
        turn.bytes_came(1);
        assert!(turn.is_over(&most));
    }
}
