//! Memory for messages that are held as a whole: unary requests and their replies.

use std::cell::Cell;

use crate::service::{Code, Status};

/// Bytes of one kind of message that this core holds. What does not fit is refused: who waits for room holds a window
/// meanwhile, and enough of them would keep the others' messages from ever becoming whole.
pub struct Memory {
    what: &'static str,
    max: usize,
    held: Cell<usize>,
}

/// Room for one message; dropping it gives the room back.
pub struct Room<'a>(&'a Memory, usize);

impl Memory {
    /// At most `max` bytes; `what` names them to the client that is refused.
    pub fn new(what: &'static str, max: usize) -> Self {
        Self { what, max, held: Cell::new(0) }
    }

    /// Room for `len` bytes, or RESOURCE_EXHAUSTED.
    pub fn take(&self, len: usize) -> Result<Room<'_>, Status> {
        let held = self.held.get() + len;
        if held > self.max {
            let Self { what, max, .. } = self;
            let text = format!("{what} in flight on this core would take more than the limit of {max} bytes");
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        self.held.set(held);
        Ok(Room(self, len))
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.held.get()
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.held.set(self.0.held.get() - self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the bound holds to the byte and room comes back. Method: fill it, overfill it, give back, fill it again.
    #[test]
    fn is_bounded() {
        let memory = Memory::new("requests", 100);
        let room = memory.take(60).unwrap();
        let other = memory.take(40).unwrap();
        let refused = memory.take(1).err().unwrap();
        assert_eq!(refused.code, Code::ResourceExhausted);
        assert!(refused.message.contains("requests") && refused.message.contains("100"), "{refused}");
        drop(room);
        assert_eq!(memory.held(), 40);
        assert!(memory.take(61).is_err() && memory.take(60).is_ok());
        drop(other);
        assert_eq!(memory.held(), 0);
    }
}
