package layout

import "fmt"

// Error says why a layout or a translation is refused.
type Error struct {
	// Field is the descriptor's or the model's field at fault, such as
	// "descriptor.dtype" or "model.rope".
	Field string
	// Have is the field's value; in a translation the writer's.
	Have string
	// Want is what it would have to be; in a translation the reader's value.
	Want string
}

// Error returns "field is have, must be want".
func (e *Error) Error() string { return fmt.Sprintf("%s is %s, must be %s", e.Field, e.Have, e.Want) }

func refuse(field string, have, want any) *Error {
	return &Error{Field: field, Have: show(have), Want: show(want)}
}

// phrase is text that is shown without quotes.
type phrase string

func show(v any) string {
	switch v := v.(type) {
	case phrase:
		return string(v)
	case string:
		if len(v) > 64 {
			v = v[:64] + "…"
		}
		return fmt.Sprintf("%q", v)
	case [2]int:
		return fmt.Sprintf("[%d, %d)", v[0], v[1])
	}
	return fmt.Sprint(v)
}
