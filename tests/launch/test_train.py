from launch import train


def test_ending_tells_bits_per_byte_where_there_are_bytes():
    summary = {"final_loss": 1.5, "val_loss": 1.25, "step_seconds": 0.5, "tokens_per_second": 1234.5}
    assert train.ending(summary) == "loss 1.5000, validation 1.2500, 0.500 s/step, 1,234 tokens/s"
    of_text = train.ending(summary | {"val_bits_per_byte": 1.8034})
    assert of_text == "loss 1.5000, validation 1.2500 (1.803 bits/byte), 0.500 s/step, 1,234 tokens/s"
